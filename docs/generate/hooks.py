"""What MkDocs calls while it builds the site: adds the pages and tables that are generated, and the version."""

import tomllib
from pathlib import Path
from typing import Any

import algorithm_pages
import command_pages
import example_page
import loss_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from collectives.job.settings import __version__

ROOT = Path(__file__).resolve().parents[2]
CHANGES = "changes.html"
TABLES = {"<!-- losses -->": loss_tables.losses, "<!-- hosts -->": loss_tables.between_hosts}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Have the header show the version, with a link to the repository if the project names one, else to the changes."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_name, config.repo_url = f"Version {__version__}", urls.get("Repository", CHANGES)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    generated = algorithm_pages.pages() | command_pages.pages() | example_page.pages()
    for path, text in generated.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **more: Any) -> str:
    for mark, table in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(table()))
    return markdown
