"""Findings of the doctor's examinations, and children that have said something."""

import json
import sys

from collectives.doctor import child
from collectives.doctor.child import Ended
from collectives.doctor.finding import Finding, Setting, examine


def found(examination, **setting) -> list[Finding]:
    return examine("job", [examination], Setting(**setting), 30)


def verdicts(findings) -> list[str]:
    return [finding.verdict for finding in findings]


def said(*messages, how="", errors="") -> Ended:
    """A child that has printed messages."""
    return Ended(how, "".join(f"{json.dumps(message)}\n" for message in messages), errors)


def script(body: str, limit_s: float = 20) -> Ended:
    return child.run([sys.executable, "-c", body], limit_s)
