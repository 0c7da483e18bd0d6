use std::path::{Path, PathBuf};

use super::*;

const COLUMNS: [&str; 2] = ["loss", "valid/error"];

fn run(folder: &Path, resume_at: Option<u64>, steps: std::ops::Range<u64>) {
    let mut sink = MetricSink::open(folder, &MetricsConfig::default(), &COLUMNS, resume_at).unwrap();
    for step in steps {
        sink.log(step, step / 2, &[("loss", 1.0 / step as f64)]).unwrap();
    }
}

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

fn event_file(folder: &Path) -> PathBuf {
    std::fs::read_dir(folder.join("tensorboard")).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn writes_a_record_a_line() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), None, 1..3);
    insta::assert_snapshot!(read(folder.path(), "metrics.jsonl"), @r#"
    {"step":1,"epoch":0,"loss":1.0}
    {"step":2,"epoch":1,"loss":0.5}
    "#);
    insta::assert_snapshot!(read(folder.path(), "metrics.csv"), @r"
    step,epoch,loss,valid/error
    1,0,1,
    2,1,0.5,
    ");
}

#[test]
fn resuming_leaves_no_record_twice_and_no_half_record() {
    let [whole, resumed] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    run(whole.path(), None, 1..6);
    run(resumed.path(), None, 1..5);
    for name in ["metrics.jsonl", "metrics.csv"] {
        let path = resumed.path().join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text + "{\"5,0").unwrap();
    }
    let path = event_file(resumed.path());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend([24, 0, 0, 0, 0]);
    std::fs::write(&path, bytes).unwrap();

    run(resumed.path(), Some(3), 4..6);
    for name in ["metrics.jsonl", "metrics.csv"] {
        assert_eq!(read(resumed.path(), name), read(whole.path(), name));
    }
    let steps = |folder: &Path| decode(&event_file(folder)).iter().map(|e| e.1).collect::<Vec<_>>();
    assert_eq!(steps(resumed.path()), steps(whole.path()));
}

#[test]
fn a_new_run_starts_new_files_where_there_are_no_records() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), None, 1..1);
    run(folder.path(), None, 1..2);
    let found = MetricSink::open(folder.path(), &MetricsConfig::default(), &COLUMNS, None);
    assert!(matches!(found, Err(Error::HoldsResults { .. })), "{found:?}");
    for kept in ["metrics.jsonl", "metrics.csv", "tensorboard"] {
        let other = tempfile::tempdir().unwrap();
        std::fs::rename(folder.path().join(kept), other.path().join(kept)).unwrap();
        assert!(any_in(other.path()).unwrap(), "{kept}");
        std::fs::rename(other.path().join(kept), folder.path().join(kept)).unwrap();
    }
    assert_eq!(read(folder.path(), "metrics.csv").lines().count(), 2);
    assert_eq!(decode(&event_file(folder.path())).len(), 2);
}

#[test]
fn tensorboard_events_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricSink::open(folder.path(), &MetricsConfig::default(), &COLUMNS, None).unwrap();
    sink.log(300, 2, &[("loss", 0.25), ("valid/error", 7.5)]).unwrap();
    sink.flush().unwrap();
    let events = decode(&event_file(folder.path()));
    assert_eq!(events[0].2, vec![("brain.Event:2".to_owned(), 0.0)]);
    assert_eq!(events[1].1, 300);
    assert_eq!(events[1].2, vec![("loss".to_owned(), 0.25), ("valid/error".to_owned(), 7.5)]);
    assert!(events[1].0 > 1.7e9, "wall time in seconds since 1970");
}

/// Readers of the files see it during a long epoch, and after a rank was killed.
#[test]
fn a_record_is_in_the_files_without_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricSink::open(folder.path(), &MetricsConfig::default(), &COLUMNS, None).unwrap();
    sink.log(1, 0, &[("loss", 0.25)]).unwrap();
    assert_eq!(read(folder.path(), "metrics.jsonl").lines().count(), 1);
    assert_eq!(read(folder.path(), "metrics.csv").lines().count(), 2);
    assert_eq!(decode(&event_file(folder.path())).len(), 2);
}

#[test]
fn errors_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let config = MetricsConfig::default();
    let mut sink = MetricSink::open(folder.path(), &config, &["loss"], None).unwrap();
    let error = sink.log(1, 0, &[("los", 1.0)]).unwrap_err().to_string();
    insta::assert_snapshot!(error, @r#"metric "los" is not among the declared columns ["loss"]; declare it when the sink is opened"#);
    drop(sink);
    std::fs::write(folder.path().join("metrics.csv"), "step,loss\n").unwrap();
    let error = MetricSink::open(folder.path(), &config, &["loss", "lr"], Some(1)).unwrap_err().to_string();
    assert!(error.contains(r#"its header is "step,loss", expected "step,epoch,…""#), "{error}");
}

/// A file of an earlier version with fewer columns continues with the new columns behind its own.
#[test]
fn resuming_adds_columns() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), None, 1..4);
    let config = MetricsConfig::default();
    let mut sink = MetricSink::open(folder.path(), &config, &["lr", "loss", "error/u"], Some(2)).unwrap();
    sink.log(3, 1, &[("error/u", 0.5), ("loss", 0.25)]).unwrap();
    drop(sink);
    insta::assert_snapshot!(read(folder.path(), "metrics.csv"), @r"
    step,epoch,loss,valid/error,lr,error/u
    1,0,1,,,
    2,1,0.5,,,
    3,1,0.25,,,0.5
    ");
}

#[test]
fn the_framing_is_tensorflows() {
    // The first record that TensorFlow's own writer makes for {wall_time: 0, file_version: "brain.Event:2"}.
    let data = [
        0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0x1a, 13, b'b', b'r', b'a', b'i', b'n', b'.', b'E', b'v', b'e', b'n',
        b't', b':', b'2',
    ];
    assert_eq!(bitwise_crc32c(b"123456789"), 0xe306_9283, "the check value of CRC-32C");
    let record = tensorboard::frame(&data);
    assert_eq!(record[..8], 24u64.to_le_bytes());
    assert_eq!(record[8..12], 0x224b_7fa3_u32.to_le_bytes(), "as at the head of every event file");
    assert_eq!(record[12..36], data);
}

type Decoded = (f64, u64, Vec<(String, f32)>);

/// Reads an event file without any of the writer's code.
fn decode(path: &Path) -> Vec<Decoded> {
    let bytes = std::fs::read(path).unwrap();
    let mut at = 0;
    let mut events = Vec::new();
    while at < bytes.len() {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        assert_eq!(word(at + 8), mask(bitwise_crc32c(&bytes[at..at + 8])));
        let data = &bytes[at + 12..at + 12 + length];
        assert_eq!(word(at + 12 + length), mask(bitwise_crc32c(data)));
        events.push(decode_event(data));
        at += length + 16;
    }
    events
}

fn decode_event(data: &[u8]) -> Decoded {
    let (mut time, mut step, mut values) = (0.0, 0, Vec::new());
    for (field, value) in fields(data) {
        match (field, value) {
            (1, Field::Eight(bits)) => time = f64::from_bits(bits),
            (2, Field::Varint(value)) => step = value,
            (3, Field::Bytes(version)) => values.push((String::from_utf8(version).unwrap(), 0.0)),
            (5, Field::Bytes(summary)) => values.extend(fields(&summary).into_iter().map(|(_, value)| {
                let Field::Bytes(value) = value else { panic!("a value is a message") };
                let parts = fields(&value);
                let [(1, Field::Bytes(tag)), (2, Field::Four(scalar))] = parts.as_slice() else {
                    panic!("a value has a tag and a scalar")
                };
                (String::from_utf8(tag.clone()).unwrap(), f32::from_bits(*scalar))
            })),
            (field, _) => panic!("field {field} was not expected"),
        }
    }
    (time, step, values)
}

enum Field {
    Varint(u64),
    Eight(u64),
    Bytes(Vec<u8>),
    Four(u32),
}

fn fields(data: &[u8]) -> Vec<(u64, Field)> {
    let mut bytes = data.iter().copied();
    let mut found = Vec::new();
    while bytes.len() > 0 {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Field::Varint(varint(&mut bytes)),
            1 => Field::Eight((0..8).map(|i| u64::from(bytes.next().unwrap()) << (8 * i)).sum()),
            2 => {
                let length = varint(&mut bytes) as usize;
                Field::Bytes(bytes.by_ref().take(length).collect())
            }
            5 => Field::Four((0..4).map(|i| u32::from(bytes.next().unwrap()) << (8 * i)).sum()),
            other => panic!("wire type {other}"),
        };
        found.push((key >> 3, value));
    }
    found
}

fn varint(bytes: &mut impl Iterator<Item = u8>) -> u64 {
    let mut value = 0;
    for place in 0.. {
        let byte = u64::from(bytes.next().unwrap());
        value += (byte & 127) << (7 * place);
        if byte < 128 {
            break;
        }
    }
    value
}

fn bitwise_crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

fn mask(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}
