"""A bottleneck of a program or a cluster, the evidence for it, and the change that helps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bottleneck:
    """One thing that limits a program.

    Attributes
    ----------
    rule
        Identifier of the rule that found it, such as "slow-link". The guide "A shuffle is slow"
        explains each rule under its identifier.
    evidence
        A sentence with the numbers that show it.
    advice
        A sentence that names the change that helps.
    setting
        The line of configuration to paste; empty if no setting helps.
    saves_s
        The most seconds that the change could save; None if unknown.
    """

    rule: str
    evidence: str
    advice: str
    setting: str = ""
    saves_s: float | None = None
