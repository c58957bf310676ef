"""What commands read from a terminal and show on it."""
