"""Pictures, tables and the HTML report."""
