//! The scripts themselves beside models of them: random steps of random clients, and each planted bug is caught.

mod model;
mod node;
#[path = "../../simulation/node.rs"]
mod node_model;
mod stage;
mod step;
mod texts;

use model::Model;
use stage::Stage;
pub(crate) use stage::now;
use step::Step;
pub(crate) use texts::script;
use texts::{Bug, NODE, bugs};

use crate::server::{Server, start};

const RUNS: u64 = 120;
const STEPS: usize = 60;

/// Random steps until the scripts and the model differ; the difference, if there is one.
async fn run(stage: &mut Stage, seed: u64) -> Result<(), String> {
    stage.clear().await;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = Model::new(&mut random);
    let mut history = String::new();
    for _ in 0..STEPS {
        let step = Step::random(&mut random, &model);
        history += &format!("{step:?}\n");
        let expected = model.take(step);
        let found = stage.take(step).await;
        model
            .compare(&expected, &found)
            .map_err(|why| format!("{why}, with seed {seed} after\n{history}"))?;
    }
    Ok(())
}

/// The first difference in any of the runs.
async fn runs(server: &Server, bug: Option<&Bug>) -> Result<(), String> {
    let mut stage = Stage::new(server, bug).await;
    for seed in 0..RUNS {
        run(&mut stage, seed).await?;
    }
    Ok(())
}

#[tokio::test]
async fn the_scripts_do_what_the_model_does() {
    runs(&start().await, None).await.unwrap();
}

#[tokio::test]
async fn every_bug_planted_in_the_scripts_is_caught() {
    let server = start().await;
    let mut escaped = Vec::new();
    for bug in bugs().iter().filter(|bug| bug.file != NODE) {
        match runs(&server, Some(bug)).await {
            Err(why) => println!("{}: {}", bug.what, why.lines().next().unwrap_or_default()),
            Ok(()) => escaped.push(bug.what),
        }
    }
    assert_eq!(escaped, Vec::<&str>::new());
}
