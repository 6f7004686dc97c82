-- The queue of the claims that wait. Scripts include this behind what they do if no claim waits, as every function here is made anew in each
-- run that gets so far.

-- How many waiters one script grants the name or removes, and holds that are over, at most; the next script goes on with those that are left.
local budget = 128

-- In a cluster, the run id of this node, with which the channels of clients end that are connected to it.
local HERE = #KEYS > 6 and ARGV[#ARGV]

-- The number of clients that received it. One that is connected to another node of a cluster counts: the nodes pass the message on, and
-- the client asks again as soon as that connection has ended.
local function tell(client, ...)
    local received = redis.call('PUBLISH', CHANNEL .. client, table.concat({ ... }, ' '))
    return HERE and string.sub(client, -#HERE) ~= HERE and 1 or received
end

-- The owner that has waited longest, and its entry.
local function oldest()
    local owner = redis.call('ZRANGE', ORDER, 0, 0)[1]
    return owner, owner and redis.call('HGET', WAITERS, owner)
end

-- Takes the owner out of the queue.
local function leave(owner)
    redis.call('ZREM', ORDER, owner)
    redis.call('HDEL', WAITERS, owner)
end

local function drop(owner)
    leave(owner)
    budget = budget - 1
end

-- On a full server Redis refuses a script's first write if it needs memory, and no later one. This write needs none and changes nothing. So
-- a claim in the queue can stay there, and be granted the lock.
local function write_although_full()
    redis.call('HDEL', WAITERS, '')
end

-- Puts the owner at the end of the queue, or keeps it where it is for another life.
local function enqueue(owner, queued, ttl, life, sent, client, info, wanted, mode)
    local entry = table.concat({ wanted .. mode, text(now + life), text(ttl), sent, text(life), client, info }, ' ')
    redis.call('HSET', WAITERS, owner, entry)
    if not queued then
        -- Numbers follow the clock, and rise where the clock was set back.
        local last = redis.call('ZRANGE', ORDER, -1, -1, 'WITHSCORES')[2]
        redis.call('ZADD', ORDER, text(math.max(now_us, (tonumber(last) or 0) + 1)), owner)
    end
    -- Both end when the last entry does.
    local kept = redis.call('PTTL', WAITERS)
    if not queued or kept < life then
        kept = math.max(kept, life)
        redis.call('PEXPIRE', ORDER, kept)
        redis.call('PEXPIRE', WAITERS, kept)
    end
end

local function read_entry(entry)
    local wanted, mode, stop, ttl, sent, life, client, info =
        string.match(entry or '', '^(%d+)(%a%d*) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
    return tonumber(stop), tonumber(ttl), sent, tonumber(life), client, info, wanted, mode
end

-- A waiter that has missed two refreshes is taken for dead.
local function is_there(stop, ttl)
    return stop and (stop - now) * 3 >= ttl
end

-- Removes entries whose time is over, wherever in the queue they are: looks at a few by chance, and goes on while many of
-- those are. As every newcomer does so, no more than about half of the queue is over.
local function sweep()
    repeat
        local some = redis.call('HRANDFIELD', WAITERS, 4, 'WITHVALUES')
        local over = 0
        for at = 1, #some, 2 do
            local stop = read_entry(some[at + 1])
            if not stop or stop <= now then
                drop(some[at])
                over = over + 1
            end
        end
    until over < 2 or budget <= 0
end

-- Tells the first in line when the lock ends, which may be sooner than its last answer said. One that does not hear of it asks at its next
-- refresh.
local function tell_first(lease)
    local owner, entry = oldest()
    local _, _, _, _, client = read_entry(entry)
    if client then
        tell(client, 'first', owner, text(lease))
    end
end

-- What keeps a claim in that mode from holding the name: nil, or the value of the hold, and how long that lasts.
local function blocker(mode)
    local value = held()
    if value then
        return value, redis.call('PTTL', LOCK)
    end
    -- Shared holds do not keep each other from it.
    if mode ~= 's' then
        return last_of(tonumber(string.match(mode, '%d+') or 1))
    end
end

local function admit(owner, token, life, client, info, mode)
    if mode == 'x' then
        return hold(owner, token, life, client, info)
    end
    share(owner, table.concat({ FORMAT, owner, token, stamp, client, info }, ' '), life, mode)
end

-- Gives the name to those that have waited longest and can hear of it, as long as there is room. The first one for whom there is none blocks those
-- behind it. Returns 'blocked', the value of the hold that blocks it, and how long that lasts; 'free' if `me` is the first or the queue is empty, and
-- whether `me` is in the queue; 'more' if it has come to an end neither way, but has seen to all the waiters that one script may. `ended` is how long
-- a hold would have lasted that has ended: the first in line may have counted on that.
local function grant_next(me, ended)
    local token, tokens, granted
    while budget > 0 do
        local owner, entry = oldest()
        if not owner or owner == me then
            return 'free', owner
        end
        local stop, ttl, sent, life, client, info, wanted, mode = read_entry(entry)
        if is_there(stop, ttl) then
            local value, lease = blocker(mode)
            if value then
                -- What is not much sooner it finds out at its next refresh.
                if granted or ended and lease * 2 <= ended then
                    tell(client, 'first', owner, text(lease))
                end
                return 'blocked', value, lease
            end
            if mode ~= 'x' then
                -- Nothing is written if one of their keys is of another type.
                shared_by(owner)
            end
            if not token then
                write_although_full()
                token, tokens = draw(wanted)
            end
            leave(owner)
            -- No longer than was asked for, should the clock have been set back.
            admit(owner, token, math.min(stop - now, life), client, info, mode)
            if tell(client, 'granted', owner, token, sent, text(life), math.min(tokens, wanted)) > 0 then
                granted, token = true, nil
            elseif mode == 'x' then
                redis.call('DEL', LOCK)
            else
                unshare(owner)
            end
            budget = budget - 1
        else
            drop(owner)
        end
    end
    return 'more'
end

-- Serves the queue after a hold that would have lasted for `ended` ms, or a wait. If something is wrong with the other keys, nothing changes. Returns
-- 1 if there is more to be done, or else 0.
local function serve(ended)
    local done, found = pcall(grant_next, nil, ended)
    return done and found == 'more' and 1 or 0
end

-- If the claim waits, `ahead` says for how many ms the first in line keeps its place, 0 if that is the claim itself.
local function busy(value, lease, life, ahead)
    return { 'busy', stamp, lease, value, life, ahead or -1 }
end

-- The answer to a claim that holds the name already: the same token, and a full ttl. An exclusive hold can become a shared one.
local function again(owner, value, left, life, mode)
    local was = mode_of(value)
    if was == 'x' and mode == 's' then
        -- Nothing is written if one of their keys is of another type.
        shared_by(owner)
        redis.call('DEL', LOCK)
        share(owner, value, math.max(left, life), mode)
        serve()
    elseif was ~= mode then
        return { 'mode', stamp, was }
    elseif left < life and mode == 'x' then
        redis.call('PEXPIRE', LOCK, life)
    elseif left < life then
        lasts(owner, life)
    end
    -- Of its block, only the last token is stored.
    return { 'granted', stamp, token_of(value), life }
end

-- Makes the owner a holder if it is one already, or if there is room and no claim comes before it. Returns the answer, or nil, the value of the hold
-- that it waits for, and how long that lasts.
local function take(owner, life, client, info, wanted, mode)
    local value, lease = held(), nil
    if owner_of(value) == owner then
        return again(owner, value, redis.call('PTTL', LOCK), life, mode)
    end
    local queued
    if value then
        lease = redis.call('PTTL', LOCK)
    else
        local left, record = shared_by(owner)
        if left > 0 and record then
            return again(owner, record, left, life, mode)
        end
        budget = budget - unshare_over(budget)
        local found
        found, value, lease = grant_next(owner)
        if found == 'more' then
            return { 'again', stamp }
        end
        if found == 'free' then
            queued = value
            value, lease = blocker(mode)
        end
    end
    -- Permits do not go together with other holds, nor with permits of another number.
    local hold_beside = value or last_of(1)
    local beside = hold_beside and mode_of(hold_beside) or mode
    if string.match(beside, '%d+') ~= string.match(mode, '%d+') then
        return { 'mode', stamp, beside }
    end
    if value then
        return nil, value, lease
    end
    local token, tokens = draw(wanted)
    admit(owner, token, life, client, info, mode)
    if queued then
        leave(owner)
        serve()
    end
    return { 'granted', stamp, token, life, tokens }
end
