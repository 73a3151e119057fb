"""Predictions: how long a traced program would take on other machines, and the cost.

`recorded_program` turns a trace into a program for the simulator, `catalogue` knows machines, and
`prediction` compares them. Nothing here runs a simulation: the caller passes the function.
"""
