"""A page that steps through schedules: `python -m teaching.page --out page.html`."""
