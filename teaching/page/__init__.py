"""A page that steps through schedules: `python -m teaching.page --out page.html`.

Other packages add scenes by entry points of the group "teaching.page": functions without arguments that return
scenes, as `teaching.page.assemble.Scene`.
"""
