//! The scripts themselves beside a model of them: random steps of random clients, and each planted bug is caught.

mod model;
pub(crate) mod stage;

use model::{Model, Step};
use stage::{Scripts, Stage};

use crate::server::Server;

const RUNS: u64 = 120;
const STEPS: usize = 60;

/// A bug: in which script what is replaced by what.
struct Bug {
    what: &'static str,
    from: &'static str,
    to: &'static str,
}

const BUGS: &[Bug] = &[
    Bug {
        what: "release without owner check",
        from: "any or owner_of(value) == OWNER)\n",
        to: "true)\n",
    },
    Bug {
        what: "a release forgets who waits",
        from: "if not any and redis.call('EXISTS', ORDER) == 0 then\n",
        to: "if not any then\n",
    },
    Bug {
        what: "a newcomer finds the lock free and passes by who waits",
        from: "redis.call('EXISTS', LOCK, HOLDERS, ORDER)",
        to: "redis.call('EXISTS', LOCK, HOLDERS)",
    },
    Bug {
        what: "a free lock is written before its token is drawn",
        from: "    local token, tokens = draw(ARGV[10])\n    hold(OWNER, token, life, ARGV[7], ARGV[8])\n",
        to: "    hold(OWNER, stamp, life, ARGV[7], ARGV[8])\n    local token, tokens = draw(ARGV[10])\n",
    },
    Bug {
        what: "a renewal brings back what is gone",
        from: "    redis.call('DEL', LOCK)\nend\nreturn { 'lost', stamp }\n",
        to: "    hold(OWNER, stamp, tonumber(ARGV[4]), 'c', 'i')\nend\nreturn { 'lost', stamp }\n",
    },
    Bug {
        what: "a renewal without owner check",
        from: "if owner_of(value) == OWNER and (ARGV[7] == ",
        to: "if value and (ARGV[7] == ",
    },
    Bug {
        what: "asking again does not start the lease anew",
        from: "elseif left < life and mode == 'x' then\n",
        to: "elseif mode == 'x' then\n        left = 0\n    elseif false then\n",
    },
    Bug {
        what: "asking again draws another token",
        from: "return { 'granted', stamp, token_of(value), life }",
        to: "return { 'granted', stamp, draw(1), life }",
    },
    Bug {
        what: "a lost counter starts anew",
        from: "math.max(least, now_us)",
        to: "last and least or 1",
    },
    Bug {
        what: "a counter that is ahead of the clock is not counted up",
        from: "math.max(least, now_us)",
        to: "now_us",
    },
    Bug {
        what: "a block begins with the last token before it",
        from: "now_us - least + 1)",
        to: "now_us - least + 2)",
    },
    Bug {
        what: "a block begins before a counter that was lost",
        from: "tonumber(last or now_us - 1) + 1",
        to: "tonumber(last or 0) + 1",
    },
    Bug {
        what: "a block has more tokens than were wanted",
        from: "math.min(tonumber(wanted), now_us - least + 1)",
        to: "now_us - least + 1",
    },
    Bug {
        what: "a waiter is granted the block of one that is gone",
        from: "math.min(tokens, wanted)",
        to: "tokens",
    },
    Bug {
        what: "tokens are printed with 14 digits",
        from: "return string.format('%.0f', number)",
        to: "return tostring(number)",
    },
    Bug {
        what: "the lock is written before its token is drawn",
        from: "    local token, tokens = draw(wanted)\n    admit(owner, token, life, client, info, mode)\n    if queued",
        to: "    admit(owner, stamp, life, client, info, mode)\n    local token, tokens = draw(wanted)\n    if queued",
    },
    Bug {
        what: "a cancelled wait leaves its entry",
        from: "    leave(OWNER)\n    more",
        to: "    more",
    },
    Bug {
        what: "a dead waiter is granted the lock",
        from: "text(life), math.min(tokens, wanted)) > 0 then",
        to: "text(life), math.min(tokens, wanted)) >= 0 then",
    },
    Bug {
        what: "a waiter is granted the lock and not told",
        from: "if tell(client, 'granted', owner, token, sent, text(life), math.min(tokens, wanted)) > 0 then",
        to: "if 1 > 0 then",
    },
    Bug {
        what: "a late request is honoured",
        from: "    if life * 2 < tonumber(ttl) then\n",
        to: "    if false then\n",
    },
    Bug {
        what: "a late renewal is honoured",
        from: "then\n    if now > tonumber(ARGV[5]) then\n        return { 'late', stamp }\n    end\n    if ARGV[6]",
        to: "then\n    if ARGV[6]",
    },
    Bug {
        what: "a renewal in time is taken for a late one",
        from: "then\n    if now > tonumber(ARGV[5]) then\n        return { 'late', stamp }\n    end\n    if ARGV[6]",
        to: "then\n    if now < tonumber(ARGV[5]) then\n        return { 'late', stamp }\n    end\n    if ARGV[6]",
    },
    Bug {
        what: "whoever was not heard of for long is granted the lock",
        from: "        if is_there(stop, ttl) then\n",
        to: "        if stop then\n",
    },
    Bug {
        what: "a request that took long gets a full ttl",
        from: "math.min(tonumber(ttl), tonumber(stop) - now)\n",
        to: "tonumber(stop) > now and tonumber(ttl) or 0\n",
    },
    Bug {
        what: "a waiter is granted a full ttl",
        from: "math.min(stop - now, life)",
        to: "ttl",
    },
    Bug {
        what: "a newcomer passes by who waits",
        from: "        if not owner or owner == me then\n",
        to: "        if not owner or me then\n",
    },
    Bug {
        what: "the last to come is served first",
        from: "redis.call('ZRANGE', ORDER, 0, 0)[1]",
        to: "redis.call('ZRANGE', ORDER, -1, -1)[1]",
    },
    Bug {
        what: "asking again while waiting goes to the end of the queue",
        from: "    if not queued then\n",
        to: "    if true then\n",
    },
    Bug {
        what: "whoever becomes the first in line is not told after a grant",
        from: "                    tell(client, 'first', owner, text(lease))\n",
        to: "",
    },
    Bug {
        what: "the first waiter is not told that a lease has become a reservation",
        from: "    pcall(tell_first, tonumber(keep))\n",
        to: "",
    },
    Bug {
        what: "trying enqueues",
        from: "if not waits then",
        to: "if false then",
    },
    Bug {
        what: "a forced release is not told to the holder",
        from: "        tell(client, 'taken', owner, token_of(hold[2]))\n",
        to: "",
    },
    Bug {
        what: "a forced release forgets who waits",
        from: "    leave(OWNER)\n    more = serve(left)\n",
        to: "    leave(OWNER)\n    more = any and 0 or serve(left)\n",
    },
    Bug {
        what: "a renewal shortens a reservation",
        from: "    if ARGV[6] ~= '1' or redis.call('PTTL', LOCK) < tonumber(ARGV[4]) then\n",
        to: "    if true then\n",
    },
    Bug {
        what: "a renewal without a reservation keeps what is longer",
        from: "    if ARGV[6] ~= '1' or redis",
        to: "    if redis",
    },
    Bug {
        what: "a reservation of an earlier grant is honoured",
        from: "(ARGV[7] == '' or token_of(value) == ARGV[7])",
        to: "true",
    },
    Bug {
        what: "a late release leaves a reservation",
        from: "keep ~= '0' then\n    if now > tonumber(ARGV[5]) then\n",
        to: "keep ~= '0' then\n    if false then\n",
    },
    Bug {
        what: "a release keeps the rest of the lease",
        from: "' ' .. RESERVED, 1)), 'PX', keep)",
        to: "' ' .. RESERVED, 1)), 'PX', math.max(keep, 100000))",
    },
    Bug {
        what: "what is only reserved has an owner",
        from: "(string.gsub(value, ' ', ' ' .. RESERVED, 1))",
        to: "value",
    },
    Bug {
        what: "a forced release tells an owner that holds no more",
        from: "if client and string.sub(owner, 1, #RESERVED) ~= RESERVED then\n",
        to: "if client then\n",
    },
    Bug {
        what: "a foreign value is taken for a free lock",
        from: "        error('fencelock: foreign value in ' .. LOCK)\n",
        to: "        redis.call('DEL', LOCK)\n        return nil\n",
    },
    Bug {
        what: "a reader passes the writer that waits",
        from: "                return 'blocked', value, lease\n",
        to: "                return 'free'\n",
    },
    Bug {
        what: "a writer is granted beside readers",
        from: "    if mode ~= 's' then\n",
        to: "    if mode ~= 's' and mode ~= 'x' then\n",
    },
    Bug {
        what: "readers are granted beside a writer",
        from: "    if value then\n        return value, redis.call('PTTL', LOCK)\n",
        to: "    if value and mode ~= 's' then\n        return value, redis.call('PTTL', LOCK)\n",
    },
    Bug {
        what: "one permit too many",
        from: "-most, -most, 'WITHSCORES'",
        to: "-most - 1, -most - 1, 'WITHSCORES'",
    },
    Bug {
        what: "a hold that is over counts",
        from: "    if left > 0 then\n        return redis.call('HGET', RECORDS, last[1])",
        to: "    if last[1] then\n        return redis.call('HGET', RECORDS, last[1])",
    },
    Bug {
        what: "readers are served one at a time",
        from: "                granted, token = true, nil\n",
        to: "                granted, token, budget = true, nil, 1\n",
    },
    Bug {
        what: "readers that are served together get the same token",
        from: "                granted, token = true, nil\n",
        to: "                granted = true\n",
    },
    Bug {
        what: "a reader that is gone is granted the lock",
        from: "                unshare(owner)\n",
        to: "                budget = budget\n",
    },
    Bug {
        what: "readers behind one that asked by itself wait on",
        from: "        leave(owner)\n        serve()\n",
        to: "        leave(owner)\n",
    },
    Bug {
        what: "the hold of a reader outlasts its release",
        from: "    redis.call('ZREM', HOLDERS, OWNER)\n    redis.call('HDEL', RECORDS, OWNER)\n",
        to: "",
    },
    Bug {
        what: "a writer that gives up holds the readers behind it up",
        from: "    leave(OWNER)\n    more = serve(left)\n",
        to: "    leave(OWNER)\n    more = released and serve(left) or 0\n",
    },
    Bug {
        what: "the first in line does not hear that what it waits for ends sooner",
        from: "if granted or ended and lease * 2 <= ended then\n",
        to: "if granted then\n",
    },
    Bug {
        what: "a forced release leaves the readers",
        from: "    redis.call('DEL', HOLDERS, RECORDS)\n",
        to: "",
    },
    Bug {
        what: "a forced release is not told to readers",
        from: "            ended[#ended + 1] = { left, record }\n",
        to: "",
    },
    Bug {
        what: "a writer that becomes a reader keeps others out",
        from: "        redis.call('DEL', LOCK)\n        share(",
        to: "        share(",
    },
    Bug {
        what: "a writer that becomes a reader forgets who waits",
        from: "math.max(left, life), mode)\n        serve()\n",
        to: "math.max(left, life), mode)\n",
    },
    Bug {
        what: "a writer that becomes a reader shortens its lease",
        from: "math.max(left, life), mode)\n",
        to: "10, mode)\n",
    },
    Bug {
        what: "a reader becomes a writer beside others",
        from: "    elseif was ~= mode then\n",
        to: "    elseif false then\n",
    },
    Bug {
        what: "permits and locks go together",
        from: "    if string.match(beside, '%d+') ~= string.match(mode, '%d+') then\n",
        to: "    if false then\n",
    },
    Bug {
        what: "asking again does not start the lease of a reader anew",
        from: "    elseif left < life then\n        lasts(owner, life)\n",
        to: "",
    },
    Bug {
        what: "a renewal brings a reader back that is over",
        from: "if left > 0 and value and (ARGV[7] == ",
        to: "if value and (ARGV[7] == ",
    },
    Bug {
        what: "a late renewal of a reader is honoured",
        from: "    if now > tonumber(ARGV[5]) then\n        return { 'late', stamp }\n    end\n    lasts(",
        to: "    lasts(",
    },
    Bug {
        what: "a renewal of a reader does nothing",
        from: "    lasts(OWNER, tonumber(ARGV[4]))\n",
        to: "",
    },
];

/// Random steps until the scripts and the model differ; the difference, if there is one.
async fn run(stage: &mut Stage, seed: u64) -> Result<(), String> {
    stage.clear().await;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = Model::new(&mut random);
    let mut history = String::new();
    for _ in 0..STEPS {
        let step = Step::random(&mut random, &model);
        history += &format!("{step:?}\n");
        let expected = model.take(&step);
        let found = stage.take(&step).await;
        model
            .compare(&expected, &found)
            .map_err(|why| format!("{why}, with seed {seed} after\n{history}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn the_scripts_do_what_the_model_does() {
    let server = Server::start();
    let mut stage = Stage::new(&server, Scripts::real()).await;
    for seed in 0..RUNS {
        run(&mut stage, seed).await.unwrap();
    }
}

#[tokio::test]
async fn every_bug_planted_in_the_scripts_is_caught() {
    let server = Server::start();
    let mut escaped = Vec::new();
    for bug in BUGS {
        let mut stage = Stage::new(&server, Scripts::with(bug.from, bug.to)).await;
        let mut caught = None;
        for seed in 0..RUNS {
            if let Err(why) = run(&mut stage, seed).await {
                caught = Some(why);
                break;
            }
        }
        match caught {
            Some(why) => println!("{}: {}", bug.what, why.lines().next().unwrap_or_default()),
            None => escaped.push(bug.what),
        }
    }
    assert_eq!(escaped, Vec::<&str>::new());
}
