//! Records of one process and of several.

use std::time::Duration;

use isobar_torch::autograd::{BackwardOptions, backward};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::*;
use crate::{ReduceOp, all_gather_v, all_reduce, start, threads};

fn traced(group: &Group) -> CommRecord {
    let x = Tensor::ones([3, 2], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    let trace = CommTrace::start(group);
    let y = {
        let _model = module("model");
        let _block = module("block.0");
        all_gather_v(&x, None, 0, true, group).unwrap()
    };
    let _sum = all_reduce(&y, ReduceOp::Sum, group).unwrap();
    backward(&[&y.sum(Kind::Float)], &[], BackwardOptions::default()).unwrap();
    trace.stop();
    group.barrier().unwrap();
    trace.record()
}

#[test]
fn what_is_communicated_is_counted_by_module_and_pass() {
    let records = threads::run(2, Duration::from_secs(30), |group: Group| traced(&group));
    let record = &records[1];
    insta::assert_snapshot!(record, @r"
    module         pass      group  operation         calls  sent  received
    -              forward   world  all_reduce            1    48        48
    model.block.0  forward   world  all_gather_v          1    24        24
    model.block.0  backward  world  reduce_scatter_v      1    24        24
    total                                                 3    96        96
    ");
    let block = record.of_module("model.block.0");
    let lengths = ["model.block", "model.blo"].map(|name| record.of_module(name).len());
    assert_eq!((block.len(), lengths), (2, [2, 0]));
    assert_eq!(block.forward().of_operation("all_gather_v").received(), 24);
    assert_eq!(block.backward().count("reduce_scatter_v"), 1);
    assert_eq!(record.of_group("elsewhere"), CommRecord::default());
    assert!(record.events().iter().all(|event| event.rank == 1 && event.end_ns >= event.begin_ns));
    assert!(record.table().lines().all(|line| line.ends_with("ms") || line.contains('.')));
}

#[test]
fn chrome_shows_a_process_for_each_rank() {
    let gathered = threads::run(2, Duration::from_secs(30), |group: Group| {
        let record = traced(&group);
        record.gather(&group).unwrap()
    });
    assert!(gathered[1].is_none());
    let mut json = gathered[0].as_ref().unwrap().to_chrome_trace();
    for event in json["traceEvents"].as_array_mut().unwrap() {
        for key in ["ts", "dur"] {
            if let Some(time) = event.get_mut(key) {
                assert!(time.as_f64().is_some_and(|time| time >= 0.0));
                *time = Value::from("time");
            }
        }
    }
    let lines: Vec<String> = json["traceEvents"].as_array().unwrap().iter().map(Value::to_string).collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    {"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"rank 0"}}
    {"name":"thread_name","ph":"M","pid":0,"tid":0,"args":{"name":"world"}}
    {"name":"process_name","ph":"M","pid":1,"tid":1,"args":{"name":"rank 1"}}
    {"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"world"}}
    {"name":"all_gather_v","cat":"forward","ph":"X","pid":0,"tid":0,"ts":"time","dur":"time","args":{"group":"world","sequence":0,"module":"model.block.0","sent":24,"received":24}}
    {"name":"all_reduce","cat":"forward","ph":"X","pid":0,"tid":0,"ts":"time","dur":"time","args":{"group":"world","sequence":1,"module":"","sent":48,"received":48}}
    {"name":"reduce_scatter_v","cat":"backward","ph":"X","pid":0,"tid":0,"ts":"time","dur":"time","args":{"group":"world","sequence":2,"module":"model.block.0","sent":24,"received":24}}
    {"name":"all_gather_v","cat":"forward","ph":"X","pid":1,"tid":1,"ts":"time","dur":"time","args":{"group":"world","sequence":0,"module":"model.block.0","sent":24,"received":24}}
    {"name":"all_reduce","cat":"forward","ph":"X","pid":1,"tid":1,"ts":"time","dur":"time","args":{"group":"world","sequence":1,"module":"","sent":48,"received":48}}
    {"name":"reduce_scatter_v","cat":"backward","ph":"X","pid":1,"tid":1,"ts":"time","dur":"time","args":{"group":"world","sequence":2,"module":"model.block.0","sent":24,"received":24}}
    "#);
    assert_eq!(json["displayTimeUnit"], "ms");
}

#[test]
fn overlapping_operations_get_rows_of_their_own() {
    let event = |begin_ns, end_ns| CommEvent {
        rank: 0,
        operation: "fetch".into(),
        group: "domain".into(),
        sequence: 0,
        module: String::new(),
        backward: false,
        sent: 0,
        received: 0,
        begin_ns,
        end_ns,
    };
    let record = CommRecord::new(vec![event(0, 10), event(5, 7), event(8, 20), event(10, 12)], 0);
    let json = record.to_chrome_trace();
    let rows: Vec<i64> = json["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["ph"] == "X")
        .map(|event| event["tid"].as_i64().unwrap())
        .collect();
    assert_eq!(rows, [0, 1, 1, 0]);
}

#[test]
fn traces_may_be_several_and_end_each_for_itself() {
    let group = Group::single();
    let x = Tensor::from_slice(&[1.0_f32]);
    let sum = || drop(start::all_reduce(&x, ReduceOp::Sum, &group).unwrap().wait().unwrap());
    sum();
    let first = CommTrace::start(&group);
    sum();
    let second = CommTrace::start(&group);
    sum();
    first.stop();
    first.stop();
    sum();
    assert_eq!((first.count("all_reduce"), second.count("all_reduce")), (2, 2));
    drop(second);
    assert!(group.call("all_reduce").traced().is_empty());
}

#[test]
fn labels_nest_and_end() {
    assert_eq!(Label::current().name(), None);
    let label = {
        let _a = module("a");
        let _b = module("b");
        Label::current()
    };
    assert_eq!((label.name(), Label::current().name()), (Some("a.b"), None));
    let _backward = label.backward();
    assert_eq!(crate::observe::label::current().1, Label::current().name() == Some("a.b"));
}
