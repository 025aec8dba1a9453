"""What commands print and the report shows: ``tables``, ``query_output``, ``statistics``, ``report_data``."""
