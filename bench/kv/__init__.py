"""The KV pool against its peers: `forebay bench kv`."""
