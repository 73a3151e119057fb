"""Scheduler, worker and client plugins, and the patches they need.

This is the only package that uses distributed's plugins, handlers and internals.
"""
