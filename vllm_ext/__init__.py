"""vLLM plugin: thin adapters from vLLM's interfaces to forebay's packages, one per capability."""
