"""What commands print and the report shows: ``tables`` (listings in columns), ``query_output`` (rows of a query, as
text or Parquet), ``statistics`` (the lake's, as text and JSON), ``report_data`` (all that the report shows, gathered),
``proxy_reward`` (what the reward model says of policies, beside what is true), ``fates`` (what became of each
promotion), ``live`` (experiments, look by look), ``runs`` (training runs, side by side, for the report),
``run_records`` (one run, and runs compared, as text).
"""
