"""Networks, tasks and metrics of text and of news."""
