"""Machines and the links between them: the model, its description as a file, what is learnt."""
