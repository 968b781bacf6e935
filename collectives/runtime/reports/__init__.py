"""What is said of calls under way: their log, the watchdog's report of a hang, the record of the last calls."""
