"""Commands that read the file of a trace."""
