"""The models of a server, and the one thread that computes with them."""
