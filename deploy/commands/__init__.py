"""The commands of ``millrace``, one file per family. What is heavy is imported when a command runs.

``service`` (up, serve, schedule), ``loop`` (score, train, evaluate, cycle), ``harness`` (evaluate --harness),
``environment`` (evaluate --environment),
``estimate`` (estimate), ``policy`` (init, promote, rollback, history, and lists of policies and reward models),
``runs`` (lists, shows and compares training runs),
``inspect`` (status, report, doctor), ``plan`` (plan), ``lake`` (the group of that name) with ``query`` (lake sql, lake
stats) and ``maintenance`` (lake compact, vacuum, retain, erase, maintain), ``data`` (data export, data import),
``suite`` (suite sample, add, show), ``decisions`` (decisions list, show, verify; power), ``experiment`` (experiment
start, show, stop, look), ``keys`` (keys create, list, revoke), ``audit`` (audit), ``monitoring`` (files for Prometheus
and Grafana), ``settings`` (help, config), ``common`` (what several share). The commands bench and demo are in
``deploy.examples``.
"""
