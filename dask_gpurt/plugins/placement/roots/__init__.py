"""Placement of tasks without inputs, on a live scheduler."""
