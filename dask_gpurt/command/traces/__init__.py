"""What the commands about traces do."""
