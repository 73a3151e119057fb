"""The work of the commands about traces."""
