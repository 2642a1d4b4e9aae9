"Hooks of pytest for both lines of fastai."

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    "A test that does not run is no test that passes: one that is skipped, or expected to fail, counts as failed."
    outcome = yield
    report = outcome.get_result()
    if report.skipped or hasattr(report, 'wasxfail'):
        report.outcome = 'failed'
        report.longrepr = f'{item.nodeid} did not run to its end as a test: {report.longrepr}'
