"""Start and end of a job: launchers, the environment, settings, errors."""
