//! A rank on another host: the command that ssh hands to the shell there.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// First line of the keeper, which tells the launcher that the connection is made. It is not shown.
pub(super) const HERE: &str = "isobar launch: the rank's host is there";

/// Stays beside the rank on its host. The first line of its standard input, which is ssh's, is the secret of the job; the others
/// say which signals to send, to the rank and to all that it has started, for they are one process group. When the input ends,
/// because the launcher or the connection has, they are asked to end, and killed some seconds later.
///
/// The words after it: what it writes first, the folder, the seconds, the command.
const KEEPER: &str = r#"printf '%s\n' "$1"
dir=$2 grace=$3
shift 3
cd -- "$dir" || exit 2
IFS= read -r ISOBAR_DISTRIBUTED_TOKEN || {
    echo "isobar launch: no secret came on standard input, which the command of --ssh must pass on" >&2
    exit 2
}
export ISOBAR_DISTRIBUTED_TOKEN
if [ -z "$OMP_NUM_THREADS" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    OMP_NUM_THREADS=$((cores / LOCAL_WORLD_SIZE))
    [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
    export OMP_NUM_THREADS
fi
exec 3<&0 </dev/null
{
    trap "" TERM INT USR1 HUP
    while IFS= read -r signal <&3; do kill -s "$signal" 0; done
    kill -s TERM 0
    while [ "$grace" -gt 0 ] && kill -s 0 $$; do sleep 1; grace=$((grace - 1)); done
    kill -s KILL 0
} >/dev/null 2>&1 &
exec 3<&-
trap : TERM INT USR1 HUP
"$@"
code=$?
[ "$code" = 0 ] || kill -s TERM 0
exit "$code""#;

/// The command line for a shell: goes to the folder, sets the variables, and runs the command under a keeper.
pub(super) fn command_line(
    dir: &OsStr,
    variables: &[(OsString, OsString)],
    grace_s: u64,
    command: &[OsString],
) -> OsString {
    let mut words: Vec<OsString> = vec!["env".into()];
    words.extend(variables.iter().map(|(name, value)| {
        let mut word = name.clone();
        word.push("=");
        word.push(value);
        word
    }));
    words.extend(["sh", "-c", KEEPER, "isobar-launch", HERE].map(OsString::from));
    words.extend([dir.to_owned(), grace_s.to_string().into()]);
    words.extend(command.iter().cloned());
    let mut line = b"exec".to_vec();
    for word in words {
        line.push(b' ');
        line.extend(quoted(&word));
    }
    OsString::from_vec(line)
}

/// A word as a POSIX shell reads it back, whatever is in it.
fn quoted(word: &OsStr) -> Vec<u8> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./=:,@%+".contains(byte);
    let bytes = word.as_bytes();
    // (A word that begins with `=` is another's path to zsh.)
    if bytes.first().is_some_and(|first| *first != b'=') && bytes.iter().all(plain) {
        return bytes.to_vec();
    }
    let mut quoted = vec![b'\''];
    for &byte in bytes {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            byte => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    /// Through two shells, as over ssh.
    #[test]
    fn words_arrive_as_they_were() {
        let odd =
            ["two words", "it's", "\"$HOME\" `id` \\ $(id)", "", "a\nb", "*", "~", "#x", "é", "-n", "!x"];
        let mut command = words(&[
            "sh",
            "-c",
            r#"for word; do printf '<%s>' "$word"; done; printf '%s' "$ODD$ISOBAR_DISTRIBUTED_TOKEN""#,
            "sh",
        ]);
        command.extend(words(&odd));
        let variables = [("ODD", "it's \"so\" $x\n"), ("LOCAL_WORLD_SIZE", "1")]
            .map(|(name, value)| (name.into(), value.into()));
        let line = command_line("/".as_ref(), &variables, 1, &command);
        let mut shell = Command::new("sh");
        // The keeper signals its whole process group.
        shell.arg("-c").arg(line).process_group(0);
        let mut child = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"the secret\n").unwrap();
        let output = child.wait_with_output().unwrap();
        drop(input);
        let expected: String = odd.iter().map(|word| format!("<{word}>")).collect();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            HERE.to_owned() + "\n" + &expected + "it's \"so\" $x\nthe secret"
        );
        assert!(output.status.success());
    }

    #[test]
    fn plain_words_stay_legible() {
        assert_eq!(quoted("train.epochs=20".as_ref()), b"train.epochs=20");
        assert_eq!(quoted("a b".as_ref()), b"'a b'");
    }
}
