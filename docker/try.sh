#!/bin/sh
# Runs every line of a Dockerfile where there is no Docker, in a Debian chroot, and its command at the end:
#     sh docker/try.sh docker/Dockerfile.cpu
# Needs root, debootstrap, 3 GB and a network. What differs from the image is printed as "skipped".
# SUITE: Debian's release, whose Python takes the place of the image's. BIND: directories of this machine that pip needs,
# such as a mirror of packages. FULL=1: also the lines that download gigabytes of CUDA, which are only resolved otherwise.
set -eu

dockerfile=$1
suite=${SUITE:-bookworm}
context=$(cd "$(dirname "$0")/.." && pwd)
root=$(mktemp -d) && chmod 755 "$root"
trap 'rm -rf "$root"' EXIT
trap 'exit 130' INT TERM

skipped() { echo "skipped  $*"; }

# The mounts are those of a namespace that ends with the command: none is left to be removed with the files.
inside() {
	unshare --mount --pid --fork --kill-child env -i root="$root" bind="${BIND:-}" where="$where" line="$1" PATH="$PATH" sh -euc '
		mount -t proc proc "$root/proc"
		mount --rbind /dev "$root/dev"
		for directory in $bind; do
			mkdir -p "$root$directory" && mount --bind "$directory" "$root$directory"
		done
		exec chroot "$root" env -i sh -euc "set -a; . /try.env; set +a; cd \"\$1\"; eval \"\$2\"" sh "$where" "$line"'
}

where=/
echo "FROM     Debian $suite"
# In a container debootstrap leaves /proc mounted under the new root, which `rm -r` would enter at the end.
unshare --mount debootstrap --variant=minbase --include=python3-venv,ca-certificates "$suite" "$root" \
	"${MIRROR:-http://deb.debian.org/debian}" > "$root.log" 2>&1 || { tail "$root.log"; exit 1; }
rm -f "$root.log"
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
	[ ! -e "$file" ] || cp -L "$file" "$root$file"
done
{ echo 'HOME=/root PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin'; env | grep '^PIP_' || true; } > "$root/try.env"
inside 'python3 -m venv /usr/local && pip install --quiet --upgrade pip'

command=
# A line that ends with a backslash continues.
sed -e ':a' -e '/\\$/N; s/\\\n//; ta' -e '/^#/d' -e '/^$/d' "$context/$dockerfile" > "$root/try.lines"
while read -r instruction rest <&3; do
	case $instruction in
	FROM) skipped "FROM $rest: $(inside 'python --version') of Debian $suite takes its place" ;;
	WORKDIR) where=$rest && mkdir -p "$root$where" && echo "WORKDIR  $where" ;;
	ENV) printf '%s\n' "$rest" >> "$root/try.env" && echo "ENV      $rest" ;;
	COPY)
		echo "COPY     $rest"
		to=$root$where/${rest##* }
		for name in ${rest% *}; do
			# Docker copies what is in a directory, and not the directory.
			if [ -d "$context/$name" ]; then mkdir -p "$to" && cp -r "$context/$name/." "$to"; else cp "$context/$name" "$to"; fi
		done
		find "$root$where" -name __pycache__ -prune -exec rm -r {} +
		;;
	RUN)
		case "$rest ${FULL:-}" in
		*constraints-gpu.txt*" ")
			skipped "RUN $rest: it downloads gigabytes of CUDA. Its packages are resolved instead:"
			inside "$rest --dry-run --ignore-installed --quiet --report /try.json"
			inside "python -c 'import json; print(len(json.load(open(\"/try.json\"))[\"install\"]), \"packages fit together\")'"
			is_dry=1
			;;
		*) echo "RUN      $rest" && inside "$rest" ;;
		esac
		;;
	# As words: ["fivefold", "doctor"] is fivefold doctor.
	ENTRYPOINT | CMD) command="$command $(printf %s "$rest" | tr -d '[],"')" ;;
	*) echo "docker/try.sh does not know the instruction $instruction: add it" >&2 && exit 2 ;;
	esac
done 3< "$root/try.lines"
if [ -n "${is_dry:-}" ]; then
	skipped "command$command: the packages are not installed"
else
	echo "command $command" && inside "$command"
fi
echo "$dockerfile: every other line ran"
