"""Starting and ending a job: launchers, the environment, settings, errors."""
