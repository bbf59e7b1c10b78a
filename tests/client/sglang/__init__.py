"""SGLang as a client, against a stand-in of its contracts."""
