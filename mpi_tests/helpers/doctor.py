"""Run the doctor's checks in tests."""

from collectives.doctor import Finding, findings_of


def examine(check, limit_s: float = 30) -> list[Finding]:
    return findings_of(check, limit_s)


def verdicts(findings) -> list[str]:
    return [finding.verdict for finding in findings]
