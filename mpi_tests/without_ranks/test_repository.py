"""The files at the top of the repository are valid, agree on the version, and name commands that exist."""

import os
import re
import subprocess
import tomllib
from datetime import date

import yaml

from collectives import __version__
from mpi_tests.helpers.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION_KEYS = {"cff-version", "message", "title", "authors"}  # required by the schema of 1.2.0
VERSIONS = re.compile(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", re.MULTILINE)


def read_yaml(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_is_complete():
    citation = read_yaml("CITATION.cff")
    assert citation.keys() >= CITATION_KEYS
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert {*citation["keywords"]} == {*PROJECT["keywords"]}


def test_the_newest_version_of_the_changelog_is_the_project_s():
    versions = VERSIONS.findall((ROOT / "CHANGELOG.md").read_text())
    newest, day = versions[0]
    assert newest == __version__
    assert date.fromisoformat(day) == read_yaml("CITATION.cff")["date-released"]


def test_the_changelog_fits_a_screen_with_a_line_for_each_point():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 60
    assert [line for line in lines if line.startswith(" ")] == []
    assert "### Breaking" in lines


def test_the_workflow_runs_ci_on_pushes_and_pull_requests():
    workflow = read_yaml(".github/workflows/ci.yml")
    assert workflow[True].keys() >= {"push", "pull_request"}  # `on` is true in YAML 1.1
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


def test_pre_commit_runs_ruff_and_codespell_alone():
    hooks = [hook["id"] for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert hooks == ["ruff-check", "ruff-format", "codespell"]


def test_the_security_policy_has_a_way_to_report():
    assert "## Reporting a vulnerability\n" in (ROOT / "SECURITY.md").read_text()
