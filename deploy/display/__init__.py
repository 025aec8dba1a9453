"""What commands print and the report shows: ``query_output``, ``statistics``, ``report_data``."""
