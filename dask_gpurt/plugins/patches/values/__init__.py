"""Patches of what happens to values: lost ones, ones that cannot be moved, and copies of them."""
