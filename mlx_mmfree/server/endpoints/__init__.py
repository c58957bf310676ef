"""What each address of the server does."""
