"""The commands of ``millrace``, one file per family. What is heavy is imported when a command runs.

``service`` (up, serve, schedule), ``loop`` (score, train, evaluate, cycle), ``gate`` (what evaluate does besides, and
how good a policy is: estimate, suite, decisions, power, experiment), ``policy`` (init, promote, rollback, history, and
lists of policies and reward models), ``runs`` (lists, shows and compares training runs), ``inspect`` (status, report,
doctor), ``plan`` (plan), ``lake`` (the groups lake and data), ``keys`` (keys create, list, revoke), ``audit`` (audit),
``monitoring`` (files for Prometheus and Grafana), ``settings`` (help, config), ``common`` (what several share). The
commands bench and demo are in ``deploy.examples``.
"""
