"""The report as one HTML page that loads nothing. All text from the trace is escaped."""
