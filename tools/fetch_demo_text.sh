#!/usr/bin/env bash
# Writes the demo model's training text to DIR from two Debian packages (as root; they are installed).
#   bible-kjv-text (with bible-kjv to read it): the King James Version, public domain
#   r-cran-janeaustenr: Jane Austen's six novels, public domain (the package is MIT)
# usage: fetch_demo_text.sh DIR
set -euo pipefail
out=${1:?usage: fetch_demo_text.sh DIR}
apt-get install -y -q --no-install-recommends bible-kjv bible-kjv-text r-cran-janeaustenr
mkdir -p "$out"
bible -f 'gen1:1-rev22:21' > "$out/kjv.txt"
for book in sensesensibility prideprejudice mansfieldpark emma northangerabbey persuasion; do
  Rscript -e "library(janeaustenr); writeLines($book)" > "$out/$book.txt"
done
wc -c "$out"/*.txt
