"""Uploads folders to the Hub, with a card that says what they are and which programs open them."""
