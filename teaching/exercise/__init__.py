"""Exercises: schedules that a student writes in a file, and the judge that proves them or names the mistake."""
