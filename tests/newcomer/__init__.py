"""What newcomers are promised, with the tests that show it."""
