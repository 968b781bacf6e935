"""A page that steps through schedules: `python -m collectives.page --out page.html`.

Other packages add scenes by entry points of the group "collectives.page": functions without arguments that return
scenes, as `collectives.page.assemble.Scene`.
"""
