"""A pool at rest: made, looked into, checked and emptied, without an engine."""
