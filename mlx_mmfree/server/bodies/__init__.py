"""The bodies of requests: their schemas, and how large ones are read in a process of their own."""
