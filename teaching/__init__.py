"""Tools to learn from: a page that steps through schedules, and exercises with their judge."""
