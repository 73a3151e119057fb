"""Traces of Nsight Systems: how its exports are read, and how they join a trace of ours."""
