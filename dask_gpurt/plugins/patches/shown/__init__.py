"""Patches of what people look at: the dashboard, and the figures that it draws."""
