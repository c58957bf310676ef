"""What the bodies of requests must look like."""
