"""What MkDocs calls while it builds the site: adds the pages and tables that are generated."""

from typing import Any

import algorithm_pages
import command_pages
import loss_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TABLES = {"<!-- losses -->": loss_tables.losses, "<!-- hosts -->": loss_tables.between_hosts}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in {**algorithm_pages.pages(), **command_pages.pages()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **more: Any) -> str:
    for mark, table in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(table()))
    return markdown
