-- What all scripts begin with. The invariants are in commands.rs.
-- KEYS: the exclusive lock, the counter, the order of the waiters, what is known of each waiter, the end of each hold that does not exclude
-- others, what is known of each such hold. In a cluster there is one more, which is never stored, so that no script with several keys runs while
-- the slot is moved to another node.
-- ARGV: 1 prefix of the clients' channels, 2 for how many ms the counter is kept, 3 the owner.
local LOCK, FENCE, ORDER, WAITERS, HOLDERS, RECORDS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local CHANNEL, RETENTION, OWNER = ARGV[1], ARGV[2], ARGV[3]
local FORMAT = '1'
local TOP_TOKEN = 9007199254740991

-- Lua would print numbers of this size with 14 digits, except where redis.call does it. This takes a microsecond.
local function text(number)
    return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
-- The same in text.
local stamp = clock[1] .. string.format('%06d', clock[2])
local now = math.floor(now_us / 1000)

local function owner_of(value)
    return value and string.match(value, '^%d+%a?%d* (%S+) %d+ ')
end

local function token_of(value)
    return string.match(value, '^%S+ %S+ (%d+) ')
end

-- The value of the lock, or nil if it is free.
local function held()
    local value = redis.call('GET', LOCK)
    if not value then
        return nil
    end
    if not owner_of(value) then
        error('fencelock: foreign value in ' .. LOCK)
    end
    return value
end

-- Draws a token: higher than the last one, and no lower than the clock. Returns how many tokens up to it the claim may use, at most
-- `wanted`: one for each microsecond since the last draw. No other claim has used them, and after a loss of data none will, as the clock
-- has passed them. If the last draw is not known, that is one.
local function draw(wanted)
    local last = redis.call('GET', FENCE)
    if last and not string.match(last, '^%d+$') then
        error('fencelock: foreign value in ' .. FENCE)
    end
    local least = tonumber(last or now_us - 1) + 1
    local token = math.max(least, now_us)
    if token > TOP_TOKEN then
        error('fencelock: foreign value in ' .. FENCE)
    end
    -- The counter is needed until the clock has passed the token for good.
    if token == now_us then
        redis.call('SET', FENCE, stamp, 'PX', RETENTION)
        return stamp, math.min(tonumber(wanted), now_us - least + 1)
    end
    local ahead = math.floor((token - now_us) / 1000)
    local drawn = text(token)
    redis.call('SET', FENCE, drawn, 'PX', ahead + RETENTION)
    return drawn, 1
end

local function hold(owner, token, life, client, info)
    local value = table.concat({ FORMAT, owner, token, stamp, client, info }, ' ')
    redis.call('SET', LOCK, value, 'PX', life, 'NX')
end

-- How long a claim may live that asks now for `ttl` but not beyond `stop`; nil if it asks too late.
local function life_of(ttl, stop)
    local life = math.min(tonumber(ttl), tonumber(stop) - now)
    if life * 2 < tonumber(ttl) then
        return nil
    end
    return life
end
