# What the recipes share; they source it. Every step is skipped where its result stands already, so
# a recipe that was stopped or killed goes on when it is started again.

set -euo pipefail

# The folder of corpora that are here already, if any; its path holds wherever the recipe goes.
have=
if [ -n "${AIAYN_DATA:-}" ]; then have=$(cd "$AIAYN_DATA" && pwd); fi

say() { printf '%s\n' "$*" >&2; }

# fetch URL: downloads into the current folder. A download that broke off goes on where it ended.
# SHA256SUMS records what came the first time; another file under that name is refused later.
fetch() {
  local url=$1 file=${1##*/}
  if [ ! -f "$file" ]; then
    say "downloading $url"
    curl --fail --location --retry 3 --continue-at - --output "$file.part" --progress-bar "$url" || {
      say "error: $url did not come whole; what came is kept in $PWD/$file.part: start again"
      return 1
    }
    mv "$file.part" "$file"
  elif [ -f SHA256SUMS ] && grep -q "  $file\$" SHA256SUMS; then
    return 0
  fi
  check_sum "$file"
}

check_sum() {
  local file=$1 sum recorded
  sum=$(sha256 "$file")
  recorded=$(grep "  $file\$" SHA256SUMS 2>/dev/null || true)
  if [ -z "$recorded" ]; then
    printf '%s  %s\n' "$sum" "$file" >> SHA256SUMS
  elif [ "${recorded%% *}" != "$sum" ]; then
    mv "$file" "$file.other"
    say "error: $file is not what was downloaded first: $sum, not ${recorded%% *} (SHA256SUMS);" \
      "it is now $PWD/$file.other"
    return 1
  fi
}

sha256() {
  if command -v sha256sum > /dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

# unpack ARCHIVE FILE: unpacks the archive, which holds FILE, once and to its end.
unpack() {
  [ -f ".$1.unpacked" ] && return 0
  say "unpacking $1"
  case $1 in
    *.gz) gunzip --stdout "$1" > "$2" ;;
    *.zip) unzip -q -o "$1" ;;
    *) tar -xf "$1" ;;
  esac
  [ -f "$2" ] || { say "error: $1 holds no $2"; return 1; }
  touch ".$1.unpacked"
}

# segments FILE.sgm: the sentences of an SGML test set, one a line.
segments() {
  grep '<seg' "$1" | sed -E 's/^.*<seg[^>]*>[[:space:]]*//; s/[[:space:]]*<\/seg>.*$//;
    s/&lt;/</g; s/&gt;/>/g; s/&quot;/"/g; s/&apos;/'"'"'/g; s/&amp;/\&/g'
}

# prepared FOLDER OPTIONS...: `keras-aiayn prepare`, once.
prepared() {
  local folder=$1
  shift
  [ -d "$folder" ] || keras-aiayn prepare --output "$folder" "$@"
}

# trained RUN OPTIONS...: `keras-aiayn train`, which goes on from its last checkpoint.
trained() {
  local run=$1
  shift
  [ -f "$run/model.keras" ] && return 0
  if [ -f "$run/config.json" ]; then
    keras-aiayn train --output "$run" --resume "$@"
  else
    keras-aiayn train --output "$run" "$@"
  fi
}
