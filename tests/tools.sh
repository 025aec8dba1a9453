#!/bin/sh
# Installs the programs that tests run, where root and apt-get are there. Tests of what is missing then are skipped, and
# a line says which. It never fails, and takes no time where all are there.

look() { # PROGRAM, its package in Debian, what its tests are of
    if command -v "$1" >/dev/null || { [ "$1" = chromium ] && [ -n "$CHROMIUM" ]; }; then return; fi
    case "$packages " in *" $2 "*) ;; *) packages="$packages $2" ;; esac
    about="$about${about:+, }$3"
}

look_for_all() {
    packages='' about=''
    look strace strace "power losses of the journal"
    look chromium chromium "the console in a browser"
    look prometheus prometheus "dashboards and alerts on a server under load"
    look promtool prometheus "alert rules"
}

apt() {
    apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=60 "$@" </dev/null >/dev/null
}

look_for_all
if [ -n "$packages" ] && [ "$(id -u 2>/dev/null)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing for the tests:$packages"
    export DEBIAN_FRONTEND=noninteractive
    apt update
    for package in $packages; do
        if [ "$package" != prometheus ]; then
            apt install --yes "$package"
        elif [ ! -d /run/systemd/system ]; then # else it would begin to serve
            apt install --yes --no-install-recommends prometheus
        fi
    done
    look_for_all
fi
if [ -n "$packages" ]; then echo "to be skipped: tests of $about (missing; Debian: apt-get install$packages)"; fi
exit 0
