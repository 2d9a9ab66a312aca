//! What is a fault and what is not, and when one strikes.

use super::*;

fn parse(text: &str) -> Fault {
    text.parse().unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn faults_are_parsed_or_refused_with_an_example() {
    let at = |point: &str, what, nth, on| Fault::At {
        point: point.to_owned(),
        what: FaultKind(what),
        nth,
        on,
    };
    assert_eq!(parse("store:panic:12"), at("store", What::Panic, 12, false));
    assert_eq!(parse("store.write_chunk:lost:1"), at("store.write_chunk", What::Lost, 1, false));
    assert_eq!(parse("io.sync:eio:3+"), at("io.sync", What::Disk(Injection::Eio), 3, true));
    let late = late(40);
    assert_eq!(parse("io:delay=40:9"), at("io", late, 9, false));
    assert_eq!(parse("random:7:100"), Fault::Random { seed: 7, per_million: 100 });
    assert_eq!(parse("record:a:b"), Fault::Record("a:b".into()));
    for wrong in [
        "",
        "store",
        "store:panic",
        "store:panic:x",
        "store:panic:0",
        "cat:panic:1",
        "store:panic:1:2",
        "store.cat:panic:1",
        "store:eio:1",
        "store:lost:1",
        "node.rows:lost:1",
        "io:lost:1",
        "io.cat:eio:1",
        "io.sync:delay=x:1",
        "random:1",
        "record:",
    ] {
        let refused = wrong.parse::<Fault>().unwrap_err();
        assert!(refused.contains("compute:panic:7") && refused.contains("free_bytes"), "{wrong}");
    }
}

#[test]
fn points_are_counted_by_kind_and_in_all() {
    let faults = ["io.sync:eio:2", "io:short:3", "io.read:enospc:2+"].map(parse);
    let plan = FaultPlan::new(faults.to_vec());
    let ask = plan.inject().unwrap();
    let eio = Some(Injection::Eio);
    let full = Some(Injection::NoSpace);
    let calls = ["sync", "sync", "write", "read", "read", "read", "sync"];
    let all = calls.map(|call| ask(call));
    assert_eq!(all, [None, eio, Some(Injection::Short), None, full, full, None]);
}

#[test]
fn a_plan_without_faults_asks_for_nothing() {
    assert!(FaultPlan::new(Vec::new()).inject().is_none());
}

#[test]
fn the_same_seed_strikes_at_the_same_calls() {
    let strikes = |seed: u64| {
        let plan = FaultPlan::new(vec![Fault::Random { seed, per_million: 50_000 }]);
        let ask = plan.inject().unwrap();
        let fails = |i: u64| {
            // A panic is one of the faults.
            let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ask("write")));
            asked.map_or(Some(i), |what| what.map(|_| i))
        };
        (0..400).filter_map(fails).collect::<Vec<_>>()
    };
    assert_eq!(strikes(3), strikes(3));
    assert_ne!(strikes(3), strikes(4));
    assert!((5..60).contains(&strikes(3).len()), "{:?}", strikes(3));
}

#[tokio::test]
async fn a_request_can_be_lost_and_a_record_tells_of_it() {
    let file = std::env::temp_dir().join(format!("faults-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let faults = vec![parse("store.save:lost:2"), Fault::Record(file.clone())];
    let plan = FaultPlan::new(faults);
    assert_eq!(plan.message("store", "save").await, Delivery::Made);
    assert_eq!(plan.message("store", "save").await, Delivery::Lost);
    assert_eq!(plan.message("run", "start").await, Delivery::Made);
    plan.write_record().unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        ["struck store.save 2 Lost", "run 1", "run.start 1", "store 2", "store.save 2"]
    );
}
