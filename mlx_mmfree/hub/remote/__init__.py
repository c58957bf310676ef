"""Downloads repositories of the Hub."""
